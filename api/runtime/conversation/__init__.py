"""The input of a conversation: messages, tools, images, token ids, and earlier prompts."""
