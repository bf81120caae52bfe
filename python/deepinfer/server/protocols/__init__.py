"""What clients of three protocols say and are told: bodies read into conversations, answers written as their JSON.

Owns: fields, messages and events of each protocol. Never touches: HTTP (see `deepinfer.server.endpoints`), models, prompts.
"""
