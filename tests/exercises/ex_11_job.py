"""★ A job that survives a restart

Goal: the user, who lives in Berlin, says: "Tell me each weekday at half past eight in the morning to water the plants." Give the
      arguments of the tool `cron`. The job must be there after a restart, and come at 08:30 in Berlin in summer and winter.
Read: channels.py:CronService, nanobot.py:JobRunner
Hint: exactly one of every_seconds, cron_expr and at. A cron expression has five fields, the minute first. tz is a zone's name.
"""

CRON = {}  # {"action": "add", "message": "…", …}
