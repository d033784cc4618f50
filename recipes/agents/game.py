"""A game of several turns that nobody here wrote: GuessTheNumber-v0 of TextArena (`pip install textarena`).

The game's own rules are longer than the tiny policy can read, so the agent says them in short. A guess is the first digit
that the policy writes. The reward is the game's: 1 for the number, and otherwise how near the last guess was.
"""

import re

import textarena

from megarl.rollout.agent import Result


async def run(row, client, highest=9, turns=4):
    game = textarena.make("GuessTheNumber-v0", min_number=1, max_number=highest, max_turns=turns)
    game.reset(num_players=1)  # `random` has the seed of the group, so all its members look for the same number
    chat = [{"role": "user", "content": f"1-{highest}"}]
    guesses, is_over = 0, False
    while not is_over:
        answer = await client.chat.completions.create(model="policy", messages=chat)
        guess = re.search("[0-9]", answer.choices[0].message.content)
        is_over, _ = game.step(f"[{guess[0]}]" if guess else "no guess")
        guesses += 1
        _, seen = game.get_observation()
        hint = "higher" if "is higher" in str(seen).lower()[-200:] else "lower"
        chat += [answer.choices[0].message.to_dict(), {"role": "user", "content": hint}]
    rewards, _ = game.close()
    return Result(rewards[0], {"guesses": guesses})
