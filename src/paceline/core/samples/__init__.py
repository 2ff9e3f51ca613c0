"""What the samples of a prompt are made of: conversation, images, trajectory, episode, rewards."""
