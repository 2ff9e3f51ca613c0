"""`paceline verify`: checks a run directory offline against the invariants, without the controller's own state.

    events.jsonl -> entries -> history of the steps -> findings
                                     |                    ^
                                     '-> metrics.jsonl, trajectories/, checkpoints/
"""
