"""Other projects' drafter checkpoints, recognised by what their config says."""
