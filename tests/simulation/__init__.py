"""The cluster in one seed: the real server, replica, publisher, consumer and operator in one loop
over simulated links and disks, so that the same seed has the same happen. See docs/simulation.md.
"""
