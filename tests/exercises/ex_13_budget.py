"""★★ A hook that stops at a price

Goal: write a hook that lets a turn spend a given limit. As soon as the requests so far cost more, no call runs any more: each
      is denied with a reason that names the limit, and the model answers with what it has. Example: the limit is 0.0065, and
      each request costs 0.003 and asks for two calls. Four calls run; those of the third request and of later ones do not.
Read: nanobot.py:AgentHook, nanobot.py:ApprovalHook, nanobot.py:CostTrackingHook
Hint: `context.usage` counts the tokens of the run so far, and is up to date when `before_execute_tools` is called; keep the
      context that `before_iteration` gets. `call.denied = "why"` keeps a call from running; the model is told why. The real
      agent takes the hook, too: AgentLoop(load_config(), hooks=[BudgetHook(0.05, 0.15, 0.60)]).
"""

from nanobot import AgentHook


class BudgetHook(AgentHook):
    """`limit` and the two prices per million tokens are in the same currency."""

    def __init__(self, limit, per_million_in, per_million_out):
        self.limit, self.per_million_in, self.per_million_out = (
            limit,
            per_million_in,
            per_million_out,
        )

    async def before_execute_tools(self, tool_calls):
        raise NotImplementedError("write BudgetHook in ex_13_budget.py")
