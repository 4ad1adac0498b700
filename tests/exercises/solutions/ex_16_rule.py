RULE = """
## count words
- how many words (are in|does) <a_file> [have]
- count [the] words (of|in) <a_file>
tool: exec
command: wc -w <a_file>
"""
