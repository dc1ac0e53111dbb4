"""An SFTP server for tests: FOLDER PORT KEY USER PASSWORD. Paths are relative to the folder, as in a chroot."""

import os
import socket
import sys
import threading
import time
from pathlib import Path

import paramiko

FOLDER, PORT, KEY, USER, PASSWORD = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4], sys.argv[5]


class Server(paramiko.ServerInterface):
    def check_auth_password(self, username, password):
        return paramiko.AUTH_SUCCESSFUL if (username, password) == (USER, PASSWORD) else paramiko.AUTH_FAILED

    def get_allowed_auths(self, username):
        return "password"

    def check_channel_request(self, kind, chanid):
        return paramiko.OPEN_SUCCEEDED


class Handle(paramiko.SFTPHandle):
    def stat(self):
        return paramiko.SFTPAttributes.from_stat(os.fstat(self.readfile.fileno()))


def errors(method):
    def wrapped(self, *arguments):
        try:
            return method(self, *arguments)
        except OSError as error:
            return paramiko.SFTPServer.convert_errno(error.errno)

    return wrapped


class Files(paramiko.SFTPServerInterface):
    def real(self, path: str) -> str:
        return f"{FOLDER}{self.canonicalize(path)}"

    @errors
    def list_folder(self, path):
        entries = []
        for name in os.listdir(self.real(path)):
            attributes = paramiko.SFTPAttributes.from_stat(os.stat(f"{self.real(path)}/{name}"))
            attributes.filename = name
            entries.append(attributes)
        return entries

    @errors
    def stat(self, path):
        return paramiko.SFTPAttributes.from_stat(os.stat(self.real(path)))

    lstat = stat

    @errors
    def open(self, path, flags, attributes):
        handle = Handle(flags)
        mode = "r+b" if flags & (os.O_WRONLY | os.O_RDWR) else "rb"
        flags = flags & ~os.O_WRONLY | os.O_RDWR if mode == "r+b" else flags
        file = os.fdopen(os.open(self.real(path), flags, 0o644), mode)
        handle.readfile = handle.writefile = file
        return handle

    @errors
    def remove(self, path):
        os.remove(self.real(path))
        return paramiko.SFTP_OK

    @errors
    def rename(self, old, new):
        os.rename(self.real(old), self.real(new))
        return paramiko.SFTP_OK

    posix_rename = rename

    @errors
    def mkdir(self, path, attributes):
        os.mkdir(self.real(path))
        return paramiko.SFTP_OK

    @errors
    def rmdir(self, path):
        os.rmdir(self.real(path))
        return paramiko.SFTP_OK


def serve(connection: socket.socket) -> None:
    transport = paramiko.Transport(connection)
    transport.add_server_key(paramiko.ECDSAKey.from_private_key_file(KEY))
    transport.set_subsystem_handler("sftp", paramiko.SFTPServer, Files)
    try:
        transport.start_server(server=Server())
        while transport.is_active():
            if (FOLDER / ".drop").exists():  # a test asks for a lost connection
                (FOLDER / ".drop").unlink(missing_ok=True)
                connection.shutdown(socket.SHUT_RDWR)
            time.sleep(0.1)  # for each connection, until the last test
    except (paramiko.SSHException, EOFError, OSError):
        pass


with socket.create_server(("127.0.0.1", PORT)) as listener:
    while True:
        threading.Thread(target=serve, args=(listener.accept()[0],), daemon=True).start()
