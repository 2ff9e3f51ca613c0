"""Generated from proto/ by tools/generate_rpc.sh; do not edit."""
