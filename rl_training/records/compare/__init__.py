"""The comparison of runs: one self-contained HTML page from their records (rl-training report RUN RUN …)."""
