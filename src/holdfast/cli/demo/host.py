"""A program that works through a pipeline, with a home, an environment and a session to resume as its arguments.

It is written as any user would write it, knows nothing of being killed, and is started again with the same words. Each
step has a key, so that a step which committed is not done twice; within a step each finished part is saved, so that a
step which did not commit goes on where it was. One JSON object a line says what happens.
"""

import json
import sys
from typing import Any

from holdfast.blocking import Session

STEPS, PARTS, ROWS = 10, 4, 25

STEP = """\
import os, time
from holdfast import kit

for part in range(PARTS):
    path = f"step-{step}-part-{part}.csv"
    if os.path.exists(path):              # saved before the host died
        continue
    time.sleep(0.04)                      # work
    with open(path, "w") as file:
        file.writelines(f"{step},{part},{row}\\n" for row in range(ROWS))
    kit.save(path, step=f"{step}.{part}")
    print(f"{step}.{part}", flush=True)   # made and saved

with open("ledger.csv", "a") as ledger:   # an append: done twice, it would show
    for part in range(PARTS):
        ledger.write(open(f"step-{step}-part-{part}.csv").read())"""


def tell(**event: Any) -> None:
    print(json.dumps(event), flush=True)


def work(session: Session) -> None:
    for step in range(1, STEPS + 1):
        code = f"step, PARTS, ROWS = {step}, {PARTS}, {ROWS}\n{STEP}"
        run = session.run(code, key=f"step-{step}", goal=f"step {step}", on_stdout=lambda text: tell(made=text.split()))
        tell(step=step, status=run.status, replayed=run.replayed, attempt=run.attempt)


def main() -> None:
    home, env, resume = sys.argv[1:4]
    session = Session(home=home, env=env or None, resume=resume or None, memory="256M", timeout=20)
    tell(session=session.id, version=session.version, recovery=session.recover().text)
    try:
        work(session)
        tell(rows=session.read("ledger.csv").decode().splitlines(), version=session.version)
    finally:
        session.close(keep=True)
