"""What a policy is worth on prompts that it does not train on."""
