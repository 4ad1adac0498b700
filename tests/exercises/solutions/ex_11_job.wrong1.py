CRON = {
    "action": "add",
    "message": "Say: water the plants.",
    "cron_expr": "30 7 * * mon-fri",
    "tz": "UTC",
}
