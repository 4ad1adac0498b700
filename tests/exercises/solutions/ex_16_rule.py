RULE = """
## count characters
- how many characters (are in|does) <a_file> [have]
- count [the] characters (of|in) <a_file>
tool: exec
command: wc -m <a_file>
"""
