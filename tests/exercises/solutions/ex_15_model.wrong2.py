ANSWERS = [
    'read_file {"path": "poem.txt"}',
    'write_file {"path": "count.txt", "content": "4"}',
    "Done.",
]
