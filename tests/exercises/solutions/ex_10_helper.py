SPAWN = {
    "task": "Read notes.txt in the current folder and say how many lines it has.",
    "wait": True,
}
