"""Published methods that change how a network is trained and nothing of how it draws: what they add stays out of the export."""
