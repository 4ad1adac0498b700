"""★★ A row that heals

Goal: a new endpoint refuses the usual request: 400 "Parameter max_tokens must be a multiple of 64, got 1000." Write the row
      that mends it: the next request has the largest multiple of 64 that is not above the old max_tokens. The user gets an
      answer and is told what was changed.
Read: providers.py:HEALING, providers.py:Remedy, providers.py:find_remedy, providers.py:setting
Hint: Remedy(complaint, notice, change): complaint is a regular expression that fits this sentence only, notice a few words
      for the user, and change(body) returns the body to send instead. Do not
      change `body` itself.
"""

from providers import Remedy  # noqa: F401

REMEDY = None  # Remedy("…", "…", …)
