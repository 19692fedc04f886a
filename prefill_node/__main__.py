"""`python -m prefill_node MODEL`: one node process that begins as a prefill node."""

from serving_node.process import node_command

main = node_command("prefill")

if __name__ == "__main__":
    main()
