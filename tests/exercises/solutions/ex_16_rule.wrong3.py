RULE = """
## count words
- how many <text> <a_file>
- count [the] words (of|in) <a_file>
tool: exec
command: wc -w <a_file>
"""
