CRON = {
    "action": "add",
    "message": "Say: water the plants.",
    "cron_expr": "30 8 * * mon-fri",
    "tz": "Europe/Berlin",
}
