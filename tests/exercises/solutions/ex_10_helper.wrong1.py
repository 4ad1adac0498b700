SPAWN = {"task": "Say how many lines the file has.", "wait": True}
