"""What crosses the border of a process: orders, reports, messages, files, and the interfaces of hosts and observers.

Runs in all processes. May import `process`, `settings`, `context` and `errors`.
"""
