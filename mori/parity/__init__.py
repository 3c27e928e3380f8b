"""Whether two ways to dispatch and combine give the same bits.

A way is a triple of API, kernel backend and target: v1 or v2, hip (or another registered one), host, cuda or hip.
Random configurations are played on both from the same inputs and poisoned memory, and held against a plain computation:

    python -m mori.parity v1:hip:host v2:hip:host --configurations 50
"""
