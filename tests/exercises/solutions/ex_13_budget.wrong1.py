from nanobot import AgentHook


class BudgetHook(AgentHook):
    def __init__(self, limit, per_million_in, per_million_out):
        self.spent = 0
        self.limit, self.per_million_in, self.per_million_out = (
            limit,
            per_million_in,
            per_million_out,
        )

    async def before_iteration(self, context):
        self.usage = {"prompt_tokens": 1000, "completion_tokens": 100}

    async def before_execute_tools(self, tool_calls):
        self.spent += (
            self.usage["prompt_tokens"] * self.per_million_in
            + self.usage["completion_tokens"] * self.per_million_out
        )
        if self.spent / 1_000_000 > self.limit:
            for call in tool_calls:
                call.denied = f"The budget of {self.limit} is used up: answer with what you have."
