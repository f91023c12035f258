"""``trace-store bench``: how fast the data plane is on this machine, and against its physical limits.

One run goes through all paths round by round, so that what else the machine does hits them alike; ratios are taken
within a round, and the median over rounds counts. Every process has the same allocator settings.
"""
