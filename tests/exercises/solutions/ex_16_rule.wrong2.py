RULE = """
## count words
- (how many words|count|read) [the words] [are] [of|in] <a_file>
tool: exec
command: wc -w <a_file>
"""
