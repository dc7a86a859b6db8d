"""Hosts on one machine: network namespaces with links of chosen bandwidth, latency and loss; and faults of both."""
