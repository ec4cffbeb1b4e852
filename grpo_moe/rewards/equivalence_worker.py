"""A process of its own that compares answers with math-verify, for `MathReward`; run as a script, never imported.

It reads one JSON line `[right, given, seconds]` at a time and writes true, false, or null where it cannot read the
right answer. The kernel ends it when a comparison takes longer: big integers and SymPy do not look at Python's signals.
Both answers are read as LaTeX, which math-verify parses with a grammar; its plain expressions would go through eval.
"""

import json
import logging
import os
import resource
import signal
import sys

_MAX_MEMORY_BYTES = 4 << 30  # of address space: 2**(2**50) fails instead of filling the machine


def main() -> None:
    """Answers pairs on standard input, a line each, until it ends."""
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # whatever prints must not get among the answers
    logging.disable(logging.WARNING)
    resource.setrlimit(resource.RLIMIT_AS, (_MAX_MEMORY_BYTES, _MAX_MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    from math_verify import LatexExtractionConfig, parse, verify

    config = [LatexExtractionConfig(boxed_match_priority=0)]

    def read(answer: str) -> list:
        return parse(f"\\boxed{{{answer}}}", config, fallback_mode="no_fallback", parsing_timeout=None)

    print("ready", file=answers, flush=True)
    for line in sys.stdin:
        right, given, seconds = json.loads(line)
        signal.setitimer(signal.ITIMER_REAL, seconds)
        parsed = read(right)
        same = bool(verify(parsed, read(given), timeout_seconds=None)) if parsed else None
        signal.setitimer(signal.ITIMER_REAL, 0)
        print(json.dumps(same), file=answers, flush=True)


if __name__ == "__main__":
    main()
