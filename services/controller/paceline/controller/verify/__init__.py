"""`paceline verify`: checks a run directory against the invariants; reads nothing outside of it.

events.jsonl -> entries -> history of the steps -> findings
                                 |                    ^
                                 '-> metrics.jsonl, trajectories/ step by step, then checkpoints/
"""
