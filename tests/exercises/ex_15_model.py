"""★ Be the model for a whole task

Goal: the user says: "Write the number of lines of poem.txt into count.txt." You are the model. Give your answers, one line each:
      a call, such as  list_dir {"path": "."}  , or a text, which ends the turn. Look first, then write, then tell the user.
Read: providers.py:HumanProvider; try it for real: nanobot agent --provider human
Hint: `nanobot prompt` shows the tools and their parameters. poem.txt is in the folder where you work; you do not know yet how
      long it is, and the grader changes it: here it has four lines.
"""

ANSWERS = []  # ['list_dir {"path": "."}', …, "It has … lines."]
