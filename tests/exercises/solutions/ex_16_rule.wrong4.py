RULE = """
## count words
- how many words are in <a_file>
- count <text> <a_file>
tool: exec
command: wc -w <a_file>
"""
