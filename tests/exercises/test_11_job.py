"""★ A job that survives a restart

Goal: the user, who lives in Berlin, says: "Tell me each weekday at half past eight in the morning to water the plants." Give the
      arguments of the tool `cron`. The job must be there after a restart, and come at 08:30 in Berlin in summer and winter.
Read: channels.py:CronService, nanobot.py:JobRunner
Hint: exactly one of every_seconds, cron_expr and at. A cron expression has five fields, the minute first. tz is a zone's name.
"""

import asyncio
import json
from datetime import datetime
from zoneinfo import ZoneInfo

from grading import check, exercise, settings

from channels import CronJob
from nanobot import AgentLoop

LOOK = "channels.py:CronService"


async def use(folder, arguments):
    """The result of a call of `cron` in an agent that was just started."""
    loop = AgentLoop(settings(folder))
    result = await loop.tools.execute("cron", arguments, loop.turn("cli:direct"))
    await loop.close()
    return result


def runs(row, begin, days):
    """When the job comes, in Berlin's clock."""
    names = CronJob.__dataclass_fields__
    job = CronJob(**{name: value for name, value in row.items() if name in names})
    now, found = begin.timestamp(), []
    end = now + days * 86_400
    while (now := job.due(now, ZoneInfo("UTC"))) and now < end and len(found) < 50:
        found.append(datetime.fromtimestamp(now, ZoneInfo("Europe/Berlin")))
    return found


def test_the_job(folder):
    arguments = exercise("11_job", "CRON")
    if not arguments:
        raise NotImplementedError("write CRON in ex_11_job.py")
    result = asyncio.run(use(folder, arguments))
    check(not result.is_error, "a job that is taken", result.text, LOOK)
    listed = asyncio.run(use(folder, {"action": "list"})).text
    check("plants" in listed, "the job in the list after a restart", listed, LOOK)
    row = json.loads((folder / "home" / "cron" / "jobs.json").read_text(encoding="utf-8"))["jobs"][
        0
    ]
    for month in (1, 7):
        begin = datetime(2027, month, 4, tzinfo=ZoneInfo("UTC"))  # a Monday
        found = runs(row, begin, 7)
        shown = [f"{moment:%a %H:%M}" for moment in found]
        right = [f"{day} 08:30" for day in ("Mon", "Tue", "Wed", "Thu", "Fri")]
        season = "winter" if month == 1 else "summer"
        check(
            shown == right,
            f"in a week of {season}, in Berlin: {right}",
            shown,
            "channels.py:CronJob",
        )
