"""★ A rule for the offline model

Goal: teach the offline model to count: "how many characters are in notes.txt?" and "count the characters of notes.txt" run `wc -m` on
      that file. Other sentences about the file still go to their own rules.
Read: templates/offline/rules.md (its first page says how a rule is written), providers.py:OfflineProvider
Hint: copy the rule that comes nearest and change it. <a_file> stands for the name of a file. A rule that comes first wins; the
      grader puts yours in front of "## greet".
"""

RULE = """
write the rule here: ## its name, sentences that begin with -, tool: and the tool's arguments
"""
