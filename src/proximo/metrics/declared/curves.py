"""The curves that every trainer has: its speed and its memory. Not those of what is learned."""

from proximo.metrics.curves import Curve, Section, Trace

MEMORY = Curve(
    key="memory",
    title="Peak memory",
    unit="MiB",
    traces=(Trace("memory/peak_mib", "peak"),),
    healthy="Level after the first steps. A steady climb is a leak.",
    section=Section.SPEED,
    from_zero=True,
)

SPEED = (
    Curve(
        key="throughput",
        title="Throughput",
        unit="tokens per second",
        traces=(Trace("throughput/train_tokens_per_second", "training"),),
        healthy="Level, but for the lengths of what is read. Falling: something else wants the machine, or memory runs "
        "short.",
        section=Section.SPEED,
        from_zero=True,
    ),
    Curve(
        key="time",
        title="Time of a step",
        unit="seconds",
        traces=(Trace("time/step_seconds", "step"),),
        healthy="Level. Evaluation and saving are not in it.",
        section=Section.SPEED,
        from_zero=True,
    ),
    MEMORY,
)
