"""What several tests share: small models of every family, trees, oracles, processes that are killed."""
