"""trace.json: what every process did when, in a file that Perfetto can open.

    TraceFile(path).write([...])    trainer rank 0, once a step: its own spans, and its workers'
"""

import json
import math
from pathlib import Path

from plumbing.files import write_whole
from plumbing.spans import MAIN, STEP_LIMIT, Span, spans

FILE_LIMIT = 200_000  # events of a file, some 20 MB
LONGEST_DECODE = 0.25  # seconds
ENCODE = json.JSONEncoder(separators=(",", ":")).encode
INSTANT = 0.002  # seconds between two engine steps that are not drawn


def join_decode(recorded: list[Span]) -> list[Span]:
    """Engine steps with nothing but an instant between them as one span, of LONGEST_DECODE at most;
    their args are added up."""
    joined: list[Span] = []
    last = None  # where in `joined` the engine step is that the next one may continue
    for span in recorded:
        name, lane, start, end, args = span
        if name == "episodes" and end - start < INSTANT:
            continue
        if name == "decode" and last is not None and end - joined[last][2] <= LONGEST_DECODE:
            before = joined[last][4]
            total = {key: before[key] + args[key] for key in before}
            joined[last] = name, lane, joined[last][2], end, total
            continue
        if lane == MAIN:
            last = len(joined) if name == "decode" else None
        joined.append(span)
    return joined


def read_trace(path: Path) -> list[dict]:
    """The events of a trace.json, without a last line that was cut off in the middle."""
    lines = path.read_text().split("\n")[1:-1] if path.exists() else []
    return [json.loads(line.rstrip(",")) for line in lines]


class TraceFile:
    """Appends events in the Chrome trace format, a line each: an array whose closing bracket is
    optional, so that the file of a run that was stopped anywhere can be read."""

    def __init__(self, path: Path, resumed_at: int | None = None, origin: float | None = None):
        """A run that goes on from a checkpoint keeps what was done before the step after it, and
        its clock goes on where that ended. `origin`: the time that is 0; by default now."""
        kept = [] if resumed_at is None else read_trace(path)
        later = [e["ts"] for e in kept if e["name"] == "step" and e["args"]["step"] > resumed_at]
        kept = [e for e in kept if e["ts"] < min(later, default=math.inf)]
        ended = max((e["ts"] + e.get("dur", 0) for e in kept), default=0)
        self._origin = (spans.clock() if origin is None else origin) - ended / 1e6
        self._named = {(e["pid"], e["tid"]) for e in kept if e["ph"] == "M"}
        self._count = len(kept)
        write_whole(path, "".join(["[\n", *(f"{ENCODE(event)},\n" for event in kept)]).encode())
        self._file = path.open("a")
        if origin is None:
            spans.clear()  # of an earlier run in this process

    def write(self, processes: list[list[Span]]) -> None:
        """Append the spans of the trainer, and of each of its workers."""
        for pid, recorded in enumerate(processes, 1):  # 0 is the idle process to Perfetto
            for name, lane, start, end, args in join_decode(recorded):
                self._name(pid, lane)
                place = {"pid": pid, "tid": lane + 1}
                # Both ends are rounded, not the length: what is nested stays so.
                ts, until = (round((at - self._origin) * 1e6) for at in (start, end))
                span = {"name": name, "ph": "X", **place, "ts": ts, "dur": until - ts}
                self._event(span | {"args": args} if args else span)
            if len(recorded) == STEP_LIMIT:
                name = f"of this step only the last {STEP_LIMIT} spans were kept"
                self._event({"name": name, "ph": "i", **place, "ts": ts})
        self._file.flush()

    def close(self) -> None:
        self._file.close()

    def _name(self, pid: int, lane: int) -> None:
        """Say what a process and a lane are called, before their first event."""
        if (pid, lane + 1) in self._named:
            return
        self._named.add((pid, lane + 1))
        loop, process = ("loop", "trainer") if pid == 1 else ("engine", f"rollout {pid - 2}")
        lanes = "scheduler" if pid == 1 else f"episodes {lane:03}"
        names = {"process_name": process, "thread_name": lanes if lane else loop}
        for what, name in names.items():
            place = {"pid": pid, "tid": lane + 1, "ts": 0}
            self._event({"name": what, "ph": "M", **place, "args": {"name": name}})

    def _event(self, event: dict) -> None:
        if self._count == FILE_LIMIT:
            event = event | {"name": f"the file is full ({FILE_LIMIT} events)", "ph": "i"}
        if self._count <= FILE_LIMIT:
            self._file.write(ENCODE(event) + ",\n")
            self._count += 1
