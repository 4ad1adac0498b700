RULE = """
## count characters
- how many characters are in <a_file>
- count ... <a_file>
tool: exec
command: wc -m <a_file>
"""
