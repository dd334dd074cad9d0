"""Records of finished requests: metrics, outcomes, latest requests and their waterfalls."""
