"""`paceline verify`: checks a run directory against the invariants, by what it holds alone.

events.jsonl -> entries -> history of the steps -> findings
                                 |                    ^
                                 '-> metrics.jsonl, trajectories/ step by step, then checkpoints/
"""
