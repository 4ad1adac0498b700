RULE = """
## count characters
- how many <text> <a_file>
- count [the] characters (of|in) <a_file>
tool: exec
command: wc -m <a_file>
"""
