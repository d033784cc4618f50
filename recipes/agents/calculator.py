"""An agent with a tool, on the plain client of `openai`: it reads a sum, may ask the calculator, and then answers.

The policy is a random model of 50 thousand weights, so the task is small: a turn with a question mark calls the calculator,
whose result the policy sees; and the answer should have digits that are odd where the result is odd, and else even.
"""

from recipes.cpu.parity import share

MAX_CALLS = 1


async def run(row, client):
    chat = [{"role": "user", "content": row["question"]}]
    calls = 0
    while True:
        answer = await client.chat.completions.create(model="policy", messages=chat)
        text = answer.choices[0].message.content
        if "?" not in text or calls == MAX_CALLS:
            # Half for the call of the tool, half for the answer.
            return 0.5 * min(calls, 1) + 0.5 * share(text, int(row["answer"]))
        calls += 1
        chat += [answer.choices[0].message.to_dict(), {"role": "user", "content": row["answer"]}]
