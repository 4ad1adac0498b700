from nanobot import AgentHook


class BudgetHook(AgentHook):
    def __init__(self, limit, per_million_in, per_million_out):
        self.limit, self.per_million_in, self.per_million_out = (
            limit,
            per_million_in,
            per_million_out,
        )

    async def before_iteration(self, context):
        self.usage = context.usage

    async def before_execute_tools(self, tool_calls):
        spent = self.usage["prompt_tokens"] * self.per_million_in
        if spent / 1_000_000 > self.limit:
            for call in tool_calls:
                call.denied = f"The budget of {self.limit} is used up: answer with what you have."
