"""★ Be the model for a whole task

Goal: the user says: "Write the number of lines of poem.txt into count.txt." You are the model. Give your answers, one line each:
      a call, such as  list_dir(".")  , or a text, which ends the turn. Look first, then write the number (4, not
      "four" or "4 lines"), then tell the user.
Read: providers.py:HumanProvider; try it for real: nanobot --provider human
Hint: `nanobot prompt` shows the tools and their parameters. The grader puts a poem.txt of four lines into the working folder.
      You know that; a model does not, so one of your calls has to look.
"""

ANSWERS = []  # ['list_dir(".")', …, "It has … lines."]
