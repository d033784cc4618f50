"""An agent that rewrites its history: it shows one number after another, and keeps nothing but the policy's last note.

Each request begins a conversation of its own, which is a segment of the rollout; the rollout has one reward, here the mean
of those of its notes. A note should have digits that are odd where the number is odd, and else even.
"""

from megarl.rollout.agent import Result
from recipes.cpu.parity import share


async def run(row, client):
    note, rewards = "", []
    numbers = [int(number) for number in row["question"].split("+")] + [int(row["answer"])]
    for number in numbers:
        chat = [{"role": "user", "content": f"{note}:{number}"}]
        answer = await client.chat.completions.create(model="policy", messages=chat)
        note = answer.choices[0].message.content
        rewards.append(share(note, number) / len(numbers))
    return Result(rewards)
