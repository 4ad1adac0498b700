CRON = {
    "action": "add",
    "message": "Say: water the plants.",
    "cron_expr": "30 8 * * *",
    "tz": "Europe/Berlin",
}
