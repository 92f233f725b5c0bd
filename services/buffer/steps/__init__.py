"""The step protocol: prompts, groups, batches and commits, and the buffers between the steps."""
