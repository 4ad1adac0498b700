ANSWERS = [
    'read_file {"path": "poem.txt"}',
    'write_file {"path": "count.txt", "content": "4"}',
    "poem.txt has 4 lines; the number is in count.txt.",
]
