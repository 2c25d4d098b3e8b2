"""The curves of every trainer: speed and memory."""

from proximo.metrics.curves import Curve, Section, Trace

MEMORY = Curve(
    key="memory",
    title="Peak memory",
    unit="MiB",
    traces=(Trace("memory/peak_mib", "peak"),),
    healthy="Constant after the first steps. A steady rise indicates a memory leak.",
    section=Section.SPEED,
    from_zero=True,
)

SPEED = (
    Curve(
        key="throughput",
        title="Throughput",
        unit="tokens per second",
        traces=(Trace("throughput/train_tokens_per_second", "training"),),
        healthy="Constant, except for changes of the sequence lengths. Falling: another process uses the machine, or "
        "memory is short.",
        section=Section.SPEED,
        from_zero=True,
    ),
    Curve(
        key="time",
        title="Time of a step",
        unit="seconds",
        traces=(Trace("time/step_seconds", "step"),),
        healthy="Constant. Evaluation and saving are not included.",
        section=Section.SPEED,
        from_zero=True,
    ),
    MEMORY,
)
