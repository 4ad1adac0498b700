RULE = """
## count characters
- (how many characters|count|read) [the characters] [are] [of|in] <a_file>
tool: exec
command: wc -m <a_file>
"""
