"""The comparison of runs: their records → one self-contained HTML page; rl-training report RUN RUN …"""
