from mori.cli import app

app()
