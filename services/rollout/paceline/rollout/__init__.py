"""The rollout service: a vLLM engine behind a mailbox."""
