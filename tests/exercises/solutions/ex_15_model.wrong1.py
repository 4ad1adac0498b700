ANSWERS = ['write_file {"path": "count.txt", "content": "4"}', "poem.txt has 4 lines."]
